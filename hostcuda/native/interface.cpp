// The C interface that hostcuda/library.py binds.
#include <c10/core/Allocator.h>

#include <cstring>
#include <unordered_map>

#include "allocator.h"

using namespace hostcuda;

namespace {

std::unordered_map<int64_t, Clock>& tokens() {
  static auto* instance = new std::unordered_map<int64_t, Clock>();
  return *instance;
}

}  // namespace

extern "C" {

void hc_start(Callback callback, int home, int devices) {
  Locked locked;
  tell(callback);
  live_on(home, devices);
  c10::SetAllocator(c10::kCUDA, &device_allocator(), 255);
}

int hc_get_device() { return current_device(); }

void hc_set_device(int device) {
  Locked locked;
  if (device != current_device()) check_home(device, "torch.cuda.set_device");
  set_current_device(device);
}

// Back to where a block of code began: torch makes no context of its own for that.
void hc_go_back_to_device(int device) { set_current_device(device); }

int64_t hc_get_stream(int device) { return current_stream(device); }
void hc_set_stream(int device, int64_t stream) { set_current_stream(device, stream); }

void hc_name_stream(int device, int64_t stream, const char* name) {
  Locked locked;
  name_of(stream_entity(device, stream)) = name;
}

void hc_synchronize(int device) {
  Locked locked;
  synchronize_device(device, "torch.cuda.synchronize");
}

// A kernel that does nothing but take time.
void hc_sleep(int device, int64_t stream, double seconds) {
  Locked locked;
  check_home(device, "torch.cuda._sleep");
  launch(stream_entity(device, stream), seconds);
}

double hc_ready_s(int device, int64_t stream) {
  Locked locked;
  return ready_s(stream_entity(device, stream));
}

// Work of a collective: `seconds` on a stream from some moment on, and what it reads and writes.
int64_t hc_launch(int device, int64_t stream, double seconds, double not_before_s) {
  Locked locked;
  check_home(device, "a collective");
  return launch(stream_entity(device, stream), seconds, kCollective, not_before_s);
}

void hc_postpone(int device, int64_t stream, void* event, int64_t number, double end_s) {
  Locked locked;
  postpone(stream_entity(device, stream), *static_cast<Clock*>(event), number, end_s);
}

void hc_use(int device, int64_t stream, void* data, int64_t bytes, int write, const char* by) {
  Locked locked;
  use(data, bytes, stream_entity(device, stream), write, by);
}

void hc_use_on_host(void* data, int64_t bytes, int write, const char* by) {
  Locked locked;
  if (is_pinned(data)) use_on_host(data, bytes, write, by);
}

// What one thread has done and knows by now, for others to hear.
int64_t hc_tell() {
  Locked locked;
  static int64_t next = 1;
  tokens()[next] = clock_of(thread_entity());
  return next++;
}

void hc_hear(int64_t token) {
  Locked locked;
  hear(tokens().at(token));
}

void hc_forget(int64_t token) {
  Locked locked;
  tokens().erase(token);
}

void hc_name_thread(const char* name) {
  Locked locked;
  name_of(thread_entity()) = name;
}

void hc_pin(void* data, int64_t bytes) {
  Locked locked;
  add_block(data, bytes, kHost, thread_entity());
}

void hc_unpin(void* data) {
  Locked locked;
  Block* block = block_at(data);
  if (block && block->base == data) unpin_block(block);
}

void hc_set_speeds(double flops, double memory, double pcie, double launch_s) {
  Locked locked;
  speeds() = {flops, memory, pcie, launch_s};
}

double hc_host_time_s() {
  Locked locked;
  return clock_of(thread_entity()).time_s;
}

double hc_event_time_s(const void* event) {
  Locked locked;
  return static_cast<const Clock*>(event)->time_s;
}

double hc_spent_s(int kind) {
  Locked locked;
  return spent_s(static_cast<Kind>(kind));
}

void hc_record_spans(int on) {
  Locked locked;
  record_spans(on);
}

int64_t hc_span_count() {
  Locked locked;
  return static_cast<int64_t>(spans().size());
}

// The first of them.
void hc_spans(void* into, int64_t count) {
  Locked locked;
  std::memcpy(into, spans().data(), count * sizeof(Span));
}

void hc_record_events(int on) {
  Locked locked;
  record_events(on);
}

int64_t hc_event_count() {
  Locked locked;
  return static_cast<int64_t>(events().size());
}

// The first of them.
void hc_events(void* into, int64_t count) {
  Locked locked;
  std::memcpy(into, events().data(), count * sizeof(Event));
}

int64_t hc_allocated(int device) { return allocated_bytes(device); }
int64_t hc_peak(int device) { return peak_bytes(device); }
void hc_reset_peak(int device) { reset_peak(device); }
}
