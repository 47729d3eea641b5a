// Selects kernels by the CPU's features. To add a build, declare its kernels and add it to the two lists of names.
#include "builds/dispatch.hpp"
#ifdef QUIRE_HAS_amx
#include "products/amx.hpp"
#endif

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace quire {

#ifdef QUIRE_HAS_avx512
namespace avx512vnni {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif
#ifdef QUIRE_HAS_avxvnni
namespace avxvnni {
extern const Kernels kernels;
}
#endif
#ifdef QUIRE_HAS_avx2
namespace avx2 {
extern const Kernels kernels;
}
#endif
#ifdef QUIRE_HAS_neondot
namespace neondot {
extern const Kernels kernels;
}
#endif
namespace portable {
extern const Kernels kernels;
}

namespace {

[[maybe_unused]] bool runs_avx512() {
#ifdef QUIRE_HAS_avx512
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

[[maybe_unused]] bool runs_avx2() {
#ifdef QUIRE_HAS_avx2
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return false;
#endif
}

// All Apple ARM processors have dot-product instructions.
[[maybe_unused]] bool runs_neondot() {
#if defined(QUIRE_HAS_neondot) && defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(QUIRE_HAS_neondot) && defined(__APPLE__)
    return true;
#else
    return false;
#endif
}

// Returns the value of QUIRE_INSTRUCTION_SET; null (use the best instruction set) if it is unset, empty or "auto".
const char* requested_instruction_set() {
    const char* requested = std::getenv("QUIRE_INSTRUCTION_SET");
    const bool is_auto = requested == nullptr || *requested == '\0' || std::strcmp(requested, "auto") == 0;
    return is_auto ? nullptr : requested;
}

const Kernels* choose_kernels() {
    const char* requested = requested_instruction_set();
    std::string usable;
    for (const char* isa : {"avx512vnni", "avx512", "avxvnni", "avx2", "neondot", "portable"}) {
        const Kernels* kernels = kernels_named(isa);
        if (kernels != nullptr && (requested == nullptr || std::strcmp(isa, requested) == 0)) return kernels;
        if (kernels != nullptr) usable += std::string(usable.empty() ? "" : ", ") + isa;
    }
    throw std::runtime_error("expected an instruction set of this processor, " + usable + ", got " + requested);
}

// AMX tiles are used for bf16 weights unless QUIRE_INSTRUCTION_SET selects a build.
[[maybe_unused]] bool runs_amx() {
#ifdef QUIRE_HAS_amx
    return requested_instruction_set() == nullptr && runs_avx512() && amx::request_permission();
#else
    return false;
#endif
}

const MatmulKernels* choose_matmul(WeightType type) {
    if (type == WeightType::float32) return active_kernels().float32;
#ifdef QUIRE_HAS_amx
    if (has_amx()) return &amx::matmul_bfloat16;
#endif
    return active_kernels().bfloat16;
}

}  // namespace

bool has_amx() {
    static const bool is_usable = runs_amx();
    return is_usable;
}

const MatmulKernels& active_matmul(WeightType type) {
    static const MatmulKernels* const by_type[] = {choose_matmul(WeightType::float32),
                                             choose_matmul(WeightType::bfloat16)};
    return *by_type[static_cast<int>(type)];
}

const Kernels* kernels_named(const char* isa) {
#ifdef QUIRE_HAS_avx512
    if (std::strcmp(isa, "avx512vnni") == 0)
        return runs_avx512() && __builtin_cpu_supports("avx512vnni") ? &avx512vnni::kernels : nullptr;
    if (std::strcmp(isa, "avx512") == 0) return runs_avx512() ? &avx512::kernels : nullptr;
#endif
#ifdef QUIRE_HAS_avxvnni
    if (std::strcmp(isa, "avxvnni") == 0)
        return runs_avx2() && __builtin_cpu_supports("avxvnni") ? &avxvnni::kernels : nullptr;
#endif
#ifdef QUIRE_HAS_avx2
    if (std::strcmp(isa, "avx2") == 0) return runs_avx2() ? &avx2::kernels : nullptr;
#endif
#ifdef QUIRE_HAS_neondot
    if (std::strcmp(isa, "neondot") == 0) return runs_neondot() ? &neondot::kernels : nullptr;
#endif
    return std::strcmp(isa, "portable") == 0 ? &portable::kernels : nullptr;
}

const Kernels& active_kernels() {
    static const Kernels* const kernels = choose_kernels();
    return *kernels;
}

}  // namespace quire
