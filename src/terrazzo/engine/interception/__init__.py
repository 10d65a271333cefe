"""What users do with a sharded model, intercepted: what it answers a loop that knows nothing of it, or refuses.

What a user does is intercepted in one of three ways. Which one follows from what is done:

    a user                                          is answered by                       modules
    calls a method of the model or an optimizer:    a subclass: that one object's        sharded_module,
    model.state_dict(), optimizer.zero_grad()       `__class__` is replaced              sharded_optimizer

    calls a function of torch with a tensor whose   a `Placeholder`: its                 buckets/parameters/at_rest,
    values are not here: p.norm(), p.grad.mul_(2)   `__torch_function__` answers         measuring/, gradients/

    begins or ends a forward, backward or step      a hook that torch calls              hooks/, gradients/,
                                                                                         unattached_optimizers

What goes past all three, such as `p.mul_(2)` where values are here, `p.grad = None` or `module.weight = other`, is
found by comparison when the next pass or step begins: `buckets/parameters/edits` compares parameters,
`hooks/module_tree` modules, and `gradients/grad_edits` what stands in `.grad`.

Nothing is replaced on a user's class, nor in torch. Two objects that users reach are replaced whole, by the same rule:
`optimizer.state` is a `FlatStates`, and a method given to `register_forward_method` an object that calls it
(forward_methods), set on that one module since a module inside a model keeps its class.

    sharded_module         the class of the model
    sharded_optimizer      the class of what steps it
    collective_calls       methods that all ranks must call together, though plain PyTorch lets one rank call them
    load_hooks             users' hooks around `load_state_dict`
    measuring              sums and norms of tensors that ranks hold in parts
    gradients              what stands in `parameter.grad`, and what it answers
    forward_methods        other methods that run as a forward does
    unattached_optimizers  steps of an optimizer that is not attached
    torch_wrappers         torch's own data parallelism, refused

Read them in that order.

`tools/user_acts.py` has the whole answer, act by act and moment by moment: a test does all of it, and a page of the
documentation shows it.
"""
