// What fuzz targets have in common: how they take their input apart, and, where libFuzzer
// does not bring one, a main() that feeds them the files of a corpus, and what they think of
// themselves.
#ifndef TF_SMB_TESTS_FUZZ_FUZZ_INPUT_H_
#define TF_SMB_TESTS_FUZZ_FUZZ_INPUT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include <string>

#if !defined(TF_SMB_LIBFUZZER)
#include <filesystem>
#include <fstream>
#include <iterator>
#endif

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace tf_smb {

// Gives zeros when it is used up.
class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size)
      : rest_(reinterpret_cast<const char*>(data), size) {}

  bool empty() const { return rest_.empty(); }
  uint64_t Number(size_t num_bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < num_bytes && !rest_.empty(); ++i) {
      value |= static_cast<uint64_t>(static_cast<uint8_t>(rest_[0])) << (8 * i);
      rest_.remove_prefix(1);
    }
    return value;
  }
  uint8_t Byte() { return static_cast<uint8_t>(Number(1)); }
  std::string_view Bytes(size_t size) {
    const std::string_view bytes = rest_.substr(0, size);
    rest_.remove_prefix(bytes.size());
    return bytes;
  }
  std::string_view Rest() { return Bytes(rest_.size()); }

 private:
  std::string_view rest_;
};

inline void FuzzOne(const std::string& bytes) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
}

// Inputs that coverage does not lead to: each target gives its own to FuzzOne.
void FuzzSystematically();

// A finding that no sanitizer would see.
inline void FuzzCheck(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz target: %s\n", what);
  std::abort();
}

}  // namespace tf_smb

#if !defined(TF_SMB_LIBFUZZER)

int main(int argc, char** argv) {
  int files = 0;
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      std::ifstream file(entry.path(), std::ios::binary);
      const std::string bytes{std::istreambuf_iterator<char>(file), {}};
      tf_smb::FuzzOne(bytes);
      ++files;
    }
  }
  tf_smb::FuzzOne("");
  tf_smb::FuzzSystematically();
  std::printf("%d files\n", files);
  return files > 0 ? 0 : 1;
}

#endif

#endif  // TF_SMB_TESTS_FUZZ_FUZZ_INPUT_H_
