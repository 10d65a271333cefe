// Allocation, poison, and what it means to free. See allocator.h.
#include "allocator.h"

#include <cstdlib>
#include <cstring>
#include <deque>

namespace hostcuda {
namespace {

constexpr int kNaN = 0xFF;                       // this byte repeated is a NaN in every floating-point dtype
constexpr size_t kAlignment = 512;               // as CUDA's caching allocator
constexpr size_t kQuarantineBytes = 64u << 20;   // freed memory keeps its poison for so long

size_t allocated[kMaxDevices] = {}, peak[kMaxDevices] = {};

bool recording = false;
std::vector<Event>& recorded() {
  static auto* instance = new std::vector<Event>();
  return *instance;
}

void record(Event::Kind kind, const Block& block, int stream = 0) {
  if (recording && block.device == home())
    recorded().push_back({kind, static_cast<int64_t>(block.number), static_cast<int64_t>(block.size), stream});
}

// Streams that freed blocks wait for, until a thread of the host has seen all that they have been given.
std::set<int>& awaited() {
  static auto* instance = new std::set<int>();
  return *instance;
}

void record_reached() {
  if (awaited().empty()) return;
  const Clock& seen = known_to_threads();
  std::erase_if(awaited(), [&](int stream) {
    const bool over = seen[stream] >= clock_of(stream)[stream];
    if (over) recorded().push_back({Event::kReached, 0, 0, stream});
    return over;
  });
}

void* poisoned(size_t bytes) {
  void* base = nullptr;
  TORCH_CHECK(posix_memalign(&base, kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment) == 0,
              "hostcuda: out of memory");
  std::memset(base, kNaN, bytes);
  return base;
}

void quarantine(void* base, size_t size) {
  static auto* freed = new std::deque<std::pair<void*, size_t>>();
  static size_t bytes = 0;
  freed->emplace_back(base, size);
  bytes += size;
  while (bytes > kQuarantineBytes) {
    std::free(freed->front().first);
    bytes -= freed->front().second;
    freed->pop_front();
  }
}

void free_device(void* context) {
  Locked locked;
  auto* block = static_cast<Block*>(context);
  record(Event::kFree, *block);
  if (recording) awaited().insert(block->recorded.begin(), block->recorded.end());
  allocated[block->device] -= block->size;
  std::memset(block->base, kNaN, block->size);
  quarantine(block->base, block->size);
  free_block(block);
}

// The real one waits for what uses the memory before it lends it again, so nothing can be too early.
void free_pinned(void* context) {
  Locked locked;
  auto* block = static_cast<Block*>(context);
  quarantine(block->base, block->size);
  block->uses.clear();
  free_block(block);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Locked locked;
    const int device = current_device();
    const c10::Device where(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
    if (!bytes) return {nullptr, nullptr, &c10::detail::deleteNothing, where};
    check_home(device, "an allocation");
    const int owner = current_entity(device);
    allocate_for(owner);
    Block* block = add_block(poisoned(bytes), bytes, device, owner);
    allocated[device] += bytes;
    peak[device] = std::max(peak[device], allocated[device]);
    record_reached();
    record(Event::kAllocate, *block, owner);
    return {block->base, block, &free_device, where};
  }
  void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Locked locked;
    if (!bytes) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::kCPU};
    Block* block = add_block(poisoned(bytes), bytes, kHost, thread_entity());
    return {block->base, block, &free_pinned, c10::kCPU};
  }
  void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }
};

}  // namespace

c10::Allocator& device_allocator() {
  static auto* instance = new DeviceAllocator();
  return *instance;
}

c10::Allocator& pinned_allocator() {
  static auto* instance = new PinnedAllocator();
  return *instance;
}

void record_stream(const void* data, int device, int64_t stream) {
  Block* block = block_at(data);
  if (!block || !block->recorded.insert(stream_entity(device, stream)).second) return;
  record(Event::kRecord, *block, stream_entity(device, stream));
}

void record_events(bool on) {
  recording = on;
  if (on) recorded().clear(), awaited().clear();
}

const std::vector<Event>& events() { return recorded(); }

size_t allocated_bytes(int device) { return allocated[device]; }
size_t peak_bytes(int device) { return peak[device]; }
void reset_peak(int device) { peak[device] = allocated[device]; }

}  // namespace hostcuda
