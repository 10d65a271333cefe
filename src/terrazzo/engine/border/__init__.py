"""The border to user code: what may be done with a sharded model, and what it answers a loop that knows nothing of it.

What a user does is intercepted in one of three ways. Which one follows from what is done:

    a user                                          is answered by                       modules
    calls a method of the model or an optimizer:    a subclass: that one object's        sharded_module,
    model.state_dict(), optimizer.zero_grad()       `__class__` is replaced              sharded_optimizer

    calls a function of torch with a tensor whose   a `Placeholder`: its                 buckets/parameters/parameter,
    values are not here: p.norm(), p.grad.mul_(2)   `__torch_function__` answers         measured, gradient_stand_in,
                                                                                         gradient_answers

    begins or ends a forward, backward or step      a hook that torch calls              hooks/, grad_attribute,
                                                                                         unattached_optimizers

What goes past all three, such as `p.mul_(2)` where values are here, `p.grad = None` or `module.weight = other`, is
found by comparison when the next pass or step begins: `buckets/parameters/edits` compares parameters,
`hooks/module_tree` modules, and `grad_edits` what stands in `.grad`.

Nothing is replaced on a user's class, nor in torch. Two objects that users reach are replaced whole, by the same rule:
`optimizer.state` is a `FlatStates`, and a method given to `register_forward_method` an object that calls it
(forward_methods), set on that one module since a module inside a model keeps its class.

Read sharded_module and sharded_optimizer; collective_calls, methods that all ranks must call together; load_hooks,
users' hooks around `load_state_dict`; grad_attribute, when `parameter.grad` is there; gradient_stand_in, what it is,
bucket_stand_ins, those of one bucket, gradient_answers, what they are answered, and grad_edits, what users put in their
place; measures and measured, sums and norms over all ranks; forward_methods; unattached_optimizers.

`tools/border.py` has the whole answer, act by act and moment by moment: a test does all of it, and a page of the
documentation shows it.
"""
