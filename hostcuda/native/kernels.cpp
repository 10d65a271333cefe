// Every kernel that the device has none of its own for: the CPU's, run at once over the same memory, and booked as work
// of the current stream that reads its inputs and writes what its schema says.
#include <ATen/core/List.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_set>

#include "tensors.h"

namespace hostcuda {
namespace {

using Stack = torch::jit::Stack;

struct Operand {
  at::Tensor original, alias;
  bool read, write;
};

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

bool writes(const c10::Argument& argument) {
  auto* alias = argument.alias_info();
  if (!alias) return false;
  for (auto& inner : alias->containedTypes())
    if (inner.isWrite()) return true;
  return alias->isWrite();
}

bool reads(const c10::OperatorHandle& op, const c10::Argument& argument) {
  static const std::unordered_set<std::string> filling{"aten::zero_", "aten::fill_", "aten::normal_", "aten::uniform_"};
  return !argument.is_out() && !filling.count(op.schema().name());
}

// One call of a kernel: takes its operands off the stack, and puts the CPU's in their place.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), name_(op.schema().name()), stack_(stack), device_(current_device()) {
    auto& arguments = op.schema().arguments();
    const size_t begin = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      reading_ = reads(op, arguments[i]), writing_ = writes(arguments[i]);
      replace((*stack)[begin + i]);
    }
    refuse_mixtures();
  }

  void run() {
    op_.callBoxed(stack_);
    book();
    for (auto& operand : operands_) take_resized(operand);
    const size_t begin = stack_->size() - op_.schema().returns().size();
    for (size_t i = begin; i < stack_->size(); ++i) {
      auto& value = (*stack_)[i];
      if (value.isTensor()) value = bring_back(value.toTensor());
      if (value.isTensorList()) value = map<at::Tensor>(value.toTensorVector(), [&](auto& t) { return bring_back(t); });
    }
  }

 private:
  template <class T, class Values, class Function>
  static c10::List<T> map(const Values& values, Function function) {
    c10::List<T> list;
    for (const T& value : values) list.push_back(function(value));
    return list;
  }

  void replace(c10::IValue& value) {
    if (value.isTensor()) {
      value = operand(value.toTensor());
    } else if (value.isTensorList()) {
      value = map<at::Tensor>(value.toTensorVector(), [&](auto& t) { return operand(t); });
    } else if (value.isOptionalTensorList()) {
      using Optional = std::optional<at::Tensor>;
      value = map<Optional>(value.toOptionalTensorVector(),
                            [&](auto& t) { return t ? Optional(operand(*t)) : std::nullopt; });
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    }
  }

  at::Tensor operand(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      cpu_tensor_ |= tensor.dim() > 0;
      cpu_scalar_ |= tensor.dim() == 0 && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
      return tensor;
    }
    device_ = tensor.device().index();
    mask_ |= tensor.scalar_type() == at::kBool && !operands_.empty();
    operands_.push_back({tensor, on_cpu(tensor, name_), reading_, writing_});
    return operands_.back().alias;
  }

  void refuse_mixtures() const {
    if (operands_.empty()) return;
    const bool takes_indices = contains(name_, "index") || contains(name_, "embedding");
    TORCH_CHECK(!cpu_tensor_ || takes_indices, name_, ": tensors on CUDA and on the CPU in one kernel");
    TORCH_CHECK(!cpu_scalar_ || !contains(name_, "_fused"), name_,
                ": a state on the CPU in a fused CUDA kernel (an illegal memory access on a GPU)");
  }

  // Kernels whose result's shape or value the host needs.
  bool host_waits() const {
    static const std::unordered_set<std::string> names{
        "aten::_local_scalar_dense", "aten::equal",    "aten::nonzero",    "aten::is_nonzero", "aten::masked_select",
        "aten::_unique2",            "aten::unique_dim", "aten::bincount", "aten::repeat_interleave"};
    return names.count(name_) || (mask_ && contains(name_, "aten::index"));
  }

  double seconds() const {
    if (name_ == "aten::mm" || name_ == "aten::addmm" || name_ == "aten::bmm") {
      const size_t first = name_ == "aten::addmm";  // an `out` comes last
      return 2.0 * operands_[first].original.numel() * operands_[first + 1].original.size(-1) / speeds().flops;
    }
    double bytes = made_bytes();
    for (auto& operand : operands_) bytes += (operand.read + operand.write) * operand.original.nbytes();
    return bytes / speeds().memory;
  }

  // Of results with memory of their own.
  double made_bytes() const {
    double bytes = 0;
    auto add = [&](const at::Tensor& tensor) {
      for (auto& operand : operands_)
        if (operand.alias.is_same(tensor)) return;
      if (tensor.defined()) bytes += tensor.nbytes();
    };
    for (size_t i = stack_->size() - op_.schema().returns().size(); i < stack_->size(); ++i) {
      auto& value = (*stack_)[i];
      if (value.isTensor()) add(value.toTensor());
      if (value.isTensorList())
        for (const at::Tensor& tensor : value.toTensorVector()) add(tensor);
    }
    return bytes;
  }

  void book() {
    Locked locked;
    entity_ = current_entity(device_);
    if (operands_.empty()) return;
    check_home(device_, name_);
    launch(entity_, seconds());
    for (auto& operand : operands_) use(operand.original, entity_, operand.write, name_);
    if (host_waits()) synchronize(clock_of(entity_), name_);
  }

  // An `out` that the kernel has given another size.
  void take_resized(Operand& operand) const {
    if (!operand.write || operand.alias.sizes() == operand.original.sizes()) return;
    operand.original.resize_(operand.alias.sizes());
    std::memcpy(address_of(operand.original, name_), operand.alias.data_ptr(), operand.alias.nbytes());
    Locked locked;
    use(operand.original, entity_, true, name_);
  }

  at::Tensor bring_back(const at::Tensor& tensor) const {
    if (!tensor.defined()) return tensor;
    for (auto& operand : operands_)
      if (operand.alias.is_same(tensor)) return operand.original;
    for (auto& operand : operands_)
      TORCH_CHECK(!tensor.numel() || tensor.storage().data() != operand.alias.storage().data(), name_,
                  ": a view that hostcuda has no kernel for");
    OnDevice there(device_);
    auto made = to_device(tensor);
    Locked locked;
    use(made, entity_, true, name_);
    return made;
  }

  const c10::OperatorHandle& op_;
  const std::string name_;
  Stack* stack_;
  int device_, entity_ = -1;
  std::vector<Operand> operands_;
  bool reading_ = false, writing_ = false;  // of the argument at hand
  bool cpu_tensor_ = false, cpu_scalar_ = false, mask_ = false;
};

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

}  // namespace
}  // namespace hostcuda
