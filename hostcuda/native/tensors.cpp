// Making, viewing, resizing and copying tensors of the device: everything that is not a kernel over its elements.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>

namespace hostcuda {

size_t span_bytes(const at::Tensor& tensor) {
  if (!tensor.numel()) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return (last + 1) * tensor.itemsize();
}

void* address_of(const at::Tensor& tensor, const std::string& by) {
  if (!tensor.numel()) return nullptr;
  TORCH_CHECK(tensor.storage().nbytes() > 0 && tensor.storage().data() != nullptr, by, " uses a tensor of shape ",
              tensor.sizes(), " whose memory has been released");
  auto* base = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  return base + tensor.storage_offset() * tensor.itemsize();
}

at::Tensor on_cpu(const at::Tensor& tensor, const std::string& by) {
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  if (!tensor.numel()) return at::detail::empty_cpu(tensor.sizes(), options);
  return at::from_blob(address_of(tensor, by), tensor.sizes(), tensor.strides(), options);
}

at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype);
}

at::Tensor to_device(const at::Tensor& cpu) {
  auto dense = cpu.is_non_overlapping_and_dense() ? cpu : cpu.contiguous();
  auto made = empty_on_device(dense.sizes(), dense.strides(), dense.scalar_type());
  if (dense.numel()) std::memcpy(made.storage().mutable_data(), dense.data_ptr(), span_bytes(dense));
  return made;
}

namespace {

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
using Format = std::optional<at::MemoryFormat>;

int index_of(Device device) { return device && device->index() >= 0 ? device->index() : current_device(); }

at::Tensor empty(at::IntArrayRef size, Dtype dtype, Layout, Device device, std::optional<bool>, Format format) {
  OnDevice there(index_of(device));
  return at::detail::empty_generic(size, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, Dtype dtype, Layout, Device device,
                         std::optional<bool>) {
  OnDevice there(index_of(device));
  return empty_on_device(size, stride, dtype.value_or(at::get_default_dtype_as_scalartype()));
}

// What `UntypedStorage.resize_` does on the device; `tensor` is any over that storage.
void resize_storage(const at::Tensor& tensor, int64_t bytes) {
  OnDevice there(tensor.device().index());
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto data = device_allocator().allocate(bytes);
  if (const size_t kept = std::min<size_t>(bytes, storage->nbytes())) {
    Locked locked;
    const int entity = current_entity(current_device());
    launch(entity);
    std::memcpy(data.get(), storage->data(), kept);
    use(storage->data(), kept, entity, false, "resize_");
    use(data.get(), kept, entity, true, "resize_");
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, Format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t needed = (impl->numel() + impl->storage_offset()) * self.itemsize();
  if (needed > self.storage().nbytes()) resize_storage(self, needed);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

void record_stream_of(at::Tensor& self, c10::Stream stream) {
  Locked locked;
  record_stream(self.storage().data(), stream.device_index(), stream.id());
  report("record_stream", "its memory stays taken until that stream has come so far");
}

// -- copies -----------------------------------------------------------------------------------------------------------

constexpr size_t kStagedBytes = 64u << 10;  // so much is copied without making the host wait

std::string memory(bool pinned) { return pinned ? "pinned memory" : "pageable memory"; }

// Pageable memory is copied to a staging buffer before the call returns; the device reads that.
void book_copy_in(const at::Tensor& target, const at::Tensor& source, int entity, bool non_blocking) {
  const std::string by = "copy from the host";
  const bool pinned = is_pinned(source.data_ptr());
  launch(entity, target.nbytes() / speeds().pcie, kCopyIn);
  if (pinned) use(source.data_ptr(), span_bytes(source), entity, false, by);
  use(target, entity, true, by);
  if (!non_blocking) synchronize(clock_of(entity), "blocking copy from " + memory(pinned));
  else if (!pinned && source.nbytes() > kStagedBytes) report("pageable", "non_blocking copy from pageable memory");
}

void book_copy_out(const at::Tensor& target, const at::Tensor& source, int entity, bool non_blocking) {
  const std::string by = "copy to the host";
  const bool pinned = is_pinned(target.data_ptr());
  launch(entity, target.nbytes() / speeds().pcie, kCopyOut);
  use(source, entity, false, by);
  use(target.data_ptr(), span_bytes(target), entity, true, by);
  if (!non_blocking || !pinned) synchronize(clock_of(entity), "blocking copy to " + memory(pinned));
}

void book_copy_within(const at::Tensor& target, const at::Tensor& source, int entity) {
  launch(entity, (target.nbytes() + source.nbytes()) / speeds().memory);
  use(source, entity, false, "copy_");
  use(target, entity, true, "copy_");
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (!self.numel()) return self;
  const bool in = !source.is_cuda(), out = !self.is_cuda();
  const int device = (out ? source : self).device().index();
  auto from = in ? source : on_cpu(source, "copy_");
  auto to = out ? self : on_cpu(self, "copy_");
  {
    Locked locked;
    check_home(device, "copy_");
    const int entity = current_entity(device);
    if (in) book_copy_in(self, source, entity, non_blocking);
    else if (out) book_copy_out(self, source, entity, non_blocking);
    else book_copy_within(self, source, entity);
  }
  to.copy_(from.expand(to.sizes()));
  return self;
}

// -- what Python asks for ---------------------------------------------------------------------------------------------

at::Tensor alias(const at::Tensor& tensor) { return on_cpu(tensor, "a collective"); }

// torch chooses by kernels that only a GPU has; this is the formula that they compute.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
                     bool grouped) {
  return std::get<0>(
      at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, causal, {}, scale, grouped));
}

TORCH_LIBRARY(hostcuda, m) {
  m.def("resize_storage(Tensor tensor, int bytes) -> ()", &resize_storage);
  m.def("alias(Tensor tensor) -> Tensor", &alias);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("copy_", TORCH_FN(copy));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("record_stream", TORCH_FN(record_stream_of));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("scaled_dot_product_attention", TORCH_FN(attention));
}

TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", TORCH_FN(attention)); }

}  // namespace
}  // namespace hostcuda
