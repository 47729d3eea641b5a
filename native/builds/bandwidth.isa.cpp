// Reads and sums memory, for measuring the read bandwidth of this machine: the upper bound (roof) of decode attention.
#include "common/simd.isa.hpp"

namespace quire::QUIRE_ISA {
namespace {

typedef Lanes<kLanes>::F F;
constexpr int64_t kChunk = 1 << 20;

double sum_chunk(const float* numbers, int64_t size) {
    F sums[8] = {};
    int64_t index = 0;
    for (; index + 8 * kLanes <= size; index += 8 * kLanes)
#pragma GCC unroll 8
        for (int n = 0; n < 8; ++n) {
            __builtin_prefetch(numbers + index + n * kLanes + 1024, 0, 2);
            sums[n] = sums[n] + load<kLanes>(numbers + index + n * kLanes);
        }
    double total = 0.0;
    for (int n = 0; n < 8; ++n) total += sum_lanes<kLanes>(sums[n]);
    for (; index < size; ++index) total += numbers[index];
    return total;
}

}  // namespace

double read_sum(const void* data, int64_t num_bytes, int num_threads) {
    const float* numbers = static_cast<const float*>(data);
    const int64_t size = num_bytes / 4, per_chunk = kChunk / 4, num_chunks = (size + per_chunk - 1) / per_chunk;
    double total = 0.0;
#pragma omp parallel for schedule(static) num_threads(num_threads) reduction(+ : total)
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        const int64_t remaining = size - chunk * per_chunk;
        total += sum_chunk(numbers + chunk * per_chunk, remaining < per_chunk ? remaining : per_chunk);
    }
    return total;
}

}  // namespace quire::QUIRE_ISA
