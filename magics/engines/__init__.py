"""`%engine`: what its subcommands do."""
