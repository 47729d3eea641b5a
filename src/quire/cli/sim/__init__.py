"""`quire sim`, `plan` and `replay`: run the scheduler and KV memory without a model."""
