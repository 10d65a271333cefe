// The device's memory, and pinned memory of the host: both lie in the host's.
#pragma once

#include <c10/core/Allocator.h>

#include "blocks.h"

namespace hostcuda {

// Allocates on the current device, for its current stream. Fresh and freed memory is full of NaN.
c10::Allocator& device_allocator();
c10::Allocator& pinned_allocator();

// Which streams a block's memory has to wait for, besides the one that it was allocated for.
void record_stream(const void* data, int device, int64_t stream);

// What has happened to the memory of the rank's own device, in order, since the recording began; caching.py reads it.
struct Event {
  enum Kind : int64_t { kAllocate, kFree, kRecord, kReached };
  int64_t kind, block, size, stream;
};

void record_events(bool on);  // anew, or no longer
const std::vector<Event>& events();

size_t allocated_bytes(int device);
size_t peak_bytes(int device);
void reset_peak(int device);

}  // namespace hostcuda
