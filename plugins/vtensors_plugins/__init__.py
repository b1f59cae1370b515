"""The built-in plugins: conventions, architectures, backends, commands; registered as a third party's are."""
