"""The dialects, a folder for each. None imports another.

What a folder has, in reading order:

    keys         a row for every key: type, default, meaning, and what is lost without it
    NAME_reader  where a document has more than keys: older spellings, prefixes, "auto", files that it names
    read         the document to a description; `read_*` are its parts
    findings     combinations of keys that the library refuses, or takes otherwise than they look
    NAME_draft   where the document that is written needs more than `core.draft`
    write        a description to the document; `write_*` are its parts
    dialect      `DIALECT`, the record of these functions, which `registry` has by the dialect's name

Folders, and what stands beside them:

    shared      what several of them say alike
    deepspeed   DeepSpeed's JSON; it also stands inside of others' documents
    fsdp1       arguments of torch's FullyShardedDataParallel; Lightning passes them on
    nested      documents inside of others', for the dialects that carry them
    accelerate  Accelerate's YAML
    fsdp2       arguments of torch's fully_shard
    lightning   Lightning's Trainer and strategies
    megatron    Megatron-LM's arguments
    terrazzo    Terrazzo's own YAML
    torchtitan  torchtitan's Trainer.Config
    trainer     Hugging Face's TrainingArguments
"""
