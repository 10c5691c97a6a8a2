"""What people look at: the live table, the summary of a study, certificates. No arithmetic here."""
