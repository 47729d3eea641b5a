"""Models over flat batches. `model` is the contract, `decoder` the fast path, `adapter` everything else."""
