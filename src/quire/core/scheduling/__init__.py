"""What a step computes: the queue, shares between tenants, the plan of a step."""
