// Who is ordered after whom: a vector clock for every stream, event and thread, and a virtual time beside it.
//
// Every stream and every thread of the host is an "entity". Work that an entity does raises its own count; waiting for
// another entity takes over what that one has seen. An earlier piece of work is over, for an entity, if and only if the
// entity has seen its count. Everything in this file is called with `Locked` held.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace hostcuda {

constexpr int kMaxDevices = 16;

struct Clock {
  std::vector<uint64_t> counts;  // by entity
  double time_s = 0;             // by when all of that is over, in virtual time

  uint64_t operator[](int entity) const;
  void join(const Clock& other);
  void tick(int entity);
};

// Kernels run at once and on the CPU; what they would take is computed from these.
struct Speeds {
  double flops = 4e14;   // FLOP/s of matrix products
  double memory = 2e12;  // bytes/s of other kernels
  double pcie = 2.5e10;  // bytes/s of copies from and to the host
  double launch_s = 0;   // what a launch costs the host
};

// What work is: kernels, on the default stream and on others, copies from and to the host, and collectives.
enum Kind { kKernel, kKernelBeside, kCopyIn, kCopyOut, kCollective, kKinds };

// Work in virtual time, on the default stream or beside it. Kernels that follow one another are one. `number` tells a
// collective from others; it lasts from when its stream comes to it, and so has the wait for other ranks in it.
struct Span {
  int64_t kind, beside, number;
  double begin_s, end_s;
};

using Callback = void (*)(const char* kind, const char* text);

// The lock over all state of the simulation. What is reported while it is held is told once it is let go: the callback
// runs Python, which may come back here.
class Locked {
 public:
  Locked();
  ~Locked();

 private:
  std::unique_lock<std::recursive_mutex> held_;
};

void report(const std::string& kind, const std::string& text);
void tell(Callback callback);

Speeds& speeds();

// The rank's own device; `devices` is how many there are. Using another one is reported as "foreign".
void live_on(int home, int devices);
int home();
int devices();
void check_home(int device, const std::string& what);

// This thread's device, and its stream on each.
int current_device();
void set_current_device(int device);
int64_t current_stream(int device);
void set_current_stream(int device, int64_t stream);

int stream_entity(int device, int64_t stream);
int64_t new_stream(int device);
// Autograd's threads count as the one that called `live_on`, which waits for them.
int thread_entity();
inline int current_entity(int device) { return stream_entity(device, current_stream(device)); }

Clock& clock_of(int entity);
std::string& name_of(int entity);
bool is_stream(int entity);
// Seconds of all work of a kind so far.
double& spent_s(Kind kind);

// When work that is launched now has its turn on a stream: all is over then that this waits for or the thread knows of.
double ready_s(int entity);
// An entity for a stream begins work that takes so long, once it has its turn and a moment has come. Its number.
int64_t launch(int entity, double seconds = 0, Kind kind = kKernel, double not_before_s = 0);
// A collective ends later than was known when it was launched, and with it what its stream and its event stand for.
void postpone(int entity, Clock& event, int64_t number, double end_s);
// Spans since the recording was last switched on.
void record_spans(bool on);
const std::vector<Span>& spans();
// The calling thread takes over what has been seen elsewhere; it does something itself.
void hear(const Clock& other);
void act();
// The same where it waits, which is reported as "sync".
void synchronize(const Clock& until, const std::string& what);
void synchronize_device(int device, const std::string& what);
// What any thread knows to be over, be it one that has ended.
const Clock& known_to_threads();

}  // namespace hostcuda
