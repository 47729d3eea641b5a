"""Scheduling: the waiting queue, fair shares between tenants, and the plan of each step."""
