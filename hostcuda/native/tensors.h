// Tensors of the device as the CPU's kernels see them, and back.
#pragma once

#include <ATen/core/Tensor.h>

#include "allocator.h"

namespace hostcuda {

// Bytes from a tensor's first element to its last.
size_t span_bytes(const at::Tensor& tensor);
// The first element's address. Errors: the memory has been released; `by` is who asks.
void* address_of(const at::Tensor& tensor, const std::string& by);
// A CPU tensor over the same memory.
at::Tensor on_cpu(const at::Tensor& tensor, const std::string& by);
// A new tensor on the current device, with the same values.
at::Tensor to_device(const at::Tensor& cpu);
at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

inline void use(const at::Tensor& tensor, int entity, bool write, const std::string& by) {
  if (tensor.numel()) use(address_of(tensor, by), span_bytes(tensor), entity, write, by);
}

class OnDevice {
 public:
  explicit OnDevice(int device) : before_(current_device()) { set_current_device(device); }
  ~OnDevice() { set_current_device(before_); }

 private:
  int before_;
};

}  // namespace hostcuda
