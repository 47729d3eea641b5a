"""`quire sim`, `plan` and `replay`: servers without a device."""
