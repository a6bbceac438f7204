"""The iteration on samples: judged steps as long as batches agree, then steps that are averaged in a learnt metric."""
