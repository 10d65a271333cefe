// What torch asks of a device before any kernel: the guard (devices, streams, events) and the hooks.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "allocator.h"

namespace hostcuda {
namespace {

c10::DeviceIndex index(int device) { return static_cast<c10::DeviceIndex>(device); }

int entity(const c10::Stream& stream) { return stream_entity(stream.device_index(), stream.id()); }

c10::Stream stream_of(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, index(device)), id);
}

Clock* clock_of_event(void* event) { return static_cast<Clock*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::kCUDA;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return index(devices()); }

  c10::Device getDevice() const override { return {c10::kCUDA, index(current_device())}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_current_device(device.index()); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    set_current_device(device.index());
    return before;
  }

  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device.index(), 0); }
  c10::Stream getStream(c10::Device device) const override {
    const int which = device.index() < 0 ? current_device() : device.index();
    return stream_of(which, current_stream(which));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Locked locked;
    const int which = device.index() < 0 ? current_device() : device.index();
    return stream_of(which, new_stream(which));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    set_current_stream(stream.device_index(), stream.id());
    return before;
  }
  // Whoever is told that work is over knows it: nothing here is ever not over, since kernels run at once.
  bool queryStream(const c10::Stream& stream) const override {
    Locked locked;
    hear(clock_of(entity(stream)));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Locked locked;
    synchronize(clock_of(entity(stream)), "Stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Locked locked;
    synchronize_device(device, "synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Locked locked;
    record_stream(data.get(), stream.device_index(), stream.id());
  }

  // An event is a copy of its stream's clock.
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    Locked locked;
    if (!*event) *event = new Clock();
    *clock_of_event(*event) = clock_of(entity(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    Locked locked;
    if (event) clock_of(entity(stream)).join(*clock_of_event(event));
  }
  bool queryEvent(void* event) const override {
    Locked locked;
    if (event) hear(*clock_of_event(event));
    return true;
  }
  void synchronizeEvent(void* event) const override {
    Locked locked;
    if (event) synchronize(*clock_of_event(event), "Event.synchronize");
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    return (clock_of_event(to)->time_s - clock_of_event(from)->time_s) * 1e3;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete clock_of_event(event); }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace
}  // namespace hostcuda

namespace at {

struct HostCudaHooks final : CUDAHooksInterface {
  explicit HostCudaHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex device) const override { return device == hostcuda::home(); }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(hostcuda::devices()); }
  int getNumGPUs() const override { return hostcuda::devices(); }
  DeviceIndex current_device() const override { return static_cast<DeviceIndex>(hostcuda::current_device()); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { hostcuda::set_current_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto before = current_device();
    if (device >= 0) hostcuda::set_current_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(DeviceIndex device) const override {
    hostcuda::Locked locked;
    hostcuda::synchronize_device(device, "synchronize");
  }
  bool isPinnedPtr(const void* data) const override {
    hostcuda::Locked locked;
    return hostcuda::is_pinned(data);
  }
  Allocator* getPinnedMemoryAllocator() const override { return &hostcuda::pinned_allocator(); }
  Allocator* getCUDADeviceAllocator() const override { return &hostcuda::device_allocator(); }
};

C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", HostCudaHooks)

}  // namespace at
