"""The iteration on samples: a second-order phase while batches agree, then averaged steps in a learnt metric."""
