// A check that throws a std::runtime_error, which PyTorch hands to Python as a RuntimeError.
//
// Messages are made without streams, unlike PyTorch's own macro. Some compilers link a copy of libstdc++ into this
// library; a stream here then takes its facets from the other copy, that of the process, and the error crashes.
#pragma once
#include <stdexcept>
#include <string>
#include <type_traits>

namespace shardsum {

template <class Part>
void append_to(std::string& text, const Part& part) {
  if constexpr (std::is_arithmetic_v<Part>)
    text += std::to_string(part);
  else
    text += part;
}

template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void fail(const Parts&... parts) {
  std::string text = "shardsum: ";
  (append_to(text, parts), ...);
  throw std::runtime_error(text);
}

}  // namespace shardsum

#define SHARDSUM_CHECK(condition, ...)               \
  do {                                               \
    if (!(condition)) ::shardsum::fail(__VA_ARGS__); \
  } while (false)
