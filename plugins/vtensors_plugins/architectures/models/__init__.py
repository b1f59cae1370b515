"""The decoder in plain torch, one file per idea, shared by the families."""
