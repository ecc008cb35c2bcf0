"""The subcommands of `lengthwise`, one a file."""
