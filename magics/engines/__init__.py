"""The subcommands of `%engine`."""
