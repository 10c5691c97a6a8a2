"""The records of a study in MLflow: one writer, one reader, behind one protocol."""
