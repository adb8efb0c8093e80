"""The files, logs, locks and lifelines that the processes of an engine share, and what each process has one of."""
