"""Engines: the only layer, with drafters, training and demo, that may import torch, transformers or vllm."""
