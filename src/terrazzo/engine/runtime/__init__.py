"""What the engine runs on: threads, the device, memory, what the system lets a process have, and torch's own dispatch.

Read calls, weak, private_torch, compiled, callers, worker, device, pages, system, overrides, in that order.
"""
