"""The only code of the service that runs on Ray: a study as Tune trials of Train workers."""
