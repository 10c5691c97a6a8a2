"""The command line: verbs, flags and exit codes. No arithmetic here."""
