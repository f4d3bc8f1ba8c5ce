"""Tests in torchrl's names alone: tools/torchrl_suite.py runs them with its schemes and with the twins."""
