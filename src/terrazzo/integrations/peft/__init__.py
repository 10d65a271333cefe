"""PEFT adapters on a sharded model. `get_peft_model` and `tz.shard` are called as always, in this order:

    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    model, optimizer = tz.shard(model, optimizer, plan="zero3")
    ...
    save_adapter(model, "my-adapter")             # PeftModel.from_pretrained(base, "my-adapter") loads it

The frozen base is split as the plan says, and has no gradient and no optimizer state. PEFT's own `save_pretrained`
cannot read sharded weights; the functions here can. All of them are called by every rank.

Taken and refused:

quantized       the precision that keeps a frozen base as a quantization config says
prepare         what `tz.shard` can take, and initial values of adapters on the meta device

Translated:

names           what PEFT calls parameters, in a model and in a folder
adapter_folder  an adapter saved and loaded
merge           the base saved with an adapter added to its weights

Changed:

prepare_adapters   on the meta device: `_init_weights` of adapter layers, asked in place of the base model's
save_adapter       while names are read: `state_dict` of the modules in `modules_to_save` (`names`)
"""

from terrazzo.integrations.peft.adapter_folder import load_adapter, save_adapter
from terrazzo.integrations.peft.merge import save_merged
from terrazzo.integrations.peft.names import base_name
from terrazzo.integrations.peft.prepare import prepare_adapters
from terrazzo.integrations.peft.quantized import precision_of

__all__ = ["base_name", "load_adapter", "precision_of", "prepare_adapters", "save_adapter", "save_merged"]
