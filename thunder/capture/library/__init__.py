"""PyTorch's own Python code that capture needs to know: autograd functions, the engine, collectives, torch.func,
Triton's launches."""
