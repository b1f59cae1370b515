"""A plugin whose import fails: it needs a module that is not installed."""

import a_module_that_is_not_installed  # noqa: F401
