"""Shared pieces of recipes/test_multimodal.py and other tests."""
