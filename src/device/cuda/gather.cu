// The gather: copies any number of ranges of any sizes to their places, in one launch.
//
// The work is cut into chunks of 32 KiB, and a block copies one. `chunk[i]` is the first chunk of slot i, so that a block finds
// its slot by bisection, and a large slot beside many small ones still uses the whole device. Everything is in the
// kernel's parameters: they are taken at the launch, so a launch in flight keeps its own sources.

#define THREADS 256u
#define CHUNK 32768u

template <unsigned K> struct Slots {
  unsigned count;
  unsigned first;  // of the graph's slots, the number of this node's first; the host reads it
  unsigned chunk[K];
  unsigned long long dst[K];
  unsigned long long src[K];
  unsigned long long bytes[K];
};

// Copies as many whole words as there are; says how many bytes that was.
template <class Word> static __device__ unsigned words(char* dst, const char* src, unsigned bytes) {
  unsigned count = bytes / sizeof(Word);
  for (unsigned i = threadIdx.x; i < count; i += THREADS)
    reinterpret_cast<Word*>(dst)[i] = reinterpret_cast<const Word*>(src)[i];
  return count * sizeof(Word);
}

// A whole chunk in words of 16 bytes: all loads of a thread are underway before its first store.
static __device__ void whole(char* dst, const char* src) {
  uint4 word[CHUNK / THREADS / 16];
#pragma unroll
  for (unsigned i = 0; i < CHUNK / THREADS / 16; ++i)
    word[i] = reinterpret_cast<const uint4*>(src)[i * THREADS + threadIdx.x];
#pragma unroll
  for (unsigned i = 0; i < CHUNK / THREADS / 16; ++i)
    reinterpret_cast<uint4*>(dst)[i * THREADS + threadIdx.x] = word[i];
}

template <unsigned K> static __device__ void gather(const Slots<K>& slots) {
  unsigned low = 0, high = slots.count;  // the slot is in [low, high)
  while (high - low > 1) {
    unsigned middle = (low + high) / 2;
    if (slots.chunk[middle] <= blockIdx.x) low = middle; else high = middle;
  }
  unsigned long long at = (unsigned long long)(blockIdx.x - slots.chunk[low]) * CHUNK;
  unsigned long long bytes = slots.bytes[low];
  if (at >= bytes) return;
  unsigned size = bytes - at < CHUNK ? (unsigned)(bytes - at) : CHUNK;
  char* dst = reinterpret_cast<char*>(slots.dst[low] + at);
  const char* src = reinterpret_cast<const char*>(slots.src[low] + at);
  unsigned long long both = slots.dst[low] | slots.src[low];
  unsigned done = 0;
  if (both % 16 == 0) {
    if (size == CHUNK) {
      whole(dst, src);
      return;
    }
    done = words<uint4>(dst, src, size);
  } else if (both % 4 == 0) {
    done = words<unsigned>(dst, src, size);
  }
  words<char>(dst + done, src + done, size - done);
}

#define GATHER(K)                                                                      \
  extern "C" __global__ void __launch_bounds__(THREADS)                                \
  cudagraph_trees_gather_##K(const __grid_constant__ Slots<K> slots) { gather(slots); }

GATHER(4)
GATHER(16)
GATHER(64)
GATHER(144)
