"""What several commands share: flags from settings, columns, exit codes."""
