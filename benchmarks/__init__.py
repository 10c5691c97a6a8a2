"""Benchmarks: what is claimed about speed, certificates and schedules, measured."""
