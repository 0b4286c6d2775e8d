"""Measuring: what packets cost and keep, beside other ways to answer the same prompts."""
