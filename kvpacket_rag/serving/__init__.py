"""Packets served over HTTP and inside other engines."""
