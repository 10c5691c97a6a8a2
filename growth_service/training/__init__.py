"""Training one trial: data, batches, ranks, stages, checkpoints. Knows neither Ray nor MLflow."""
