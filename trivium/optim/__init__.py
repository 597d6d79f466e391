"""Optimizers by the role of each weight, and schedules that are pure functions of the step."""
