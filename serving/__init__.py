"""The service: answers from the stored tiers first, computes live when it must, and always says which."""
