"""Budgets as data: one JSON file each, named like the budget with underscores."""
