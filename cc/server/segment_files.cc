#include "cc/server/segment_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "cc/wire/coding.h"

namespace tf_smb {
namespace {

constexpr size_t kMaxPartBytes = 100;  // two of them fit into the 255 of a file name

bool IsPlain(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '-';
}

std::string Escape(std::string_view name) {
  std::string text;
  char code[24];
  for (const char c : name) {
    if (IsPlain(c)) {
      text += c;
      continue;
    }
    std::snprintf(code, sizeof(code), "%%%02X", static_cast<unsigned char>(c));
    text += code;
  }
  if (text.size() <= kMaxPartBytes) return text;
  std::snprintf(code, sizeof(code), "~%016llx",
                static_cast<unsigned long long>(Checksum(name)));
  return text.substr(0, kMaxPartBytes - std::strlen(code)) + code;
}

std::string Prefix(std::string_view server_name) {
  return "tf_smb." + std::to_string(geteuid()) + "." + Escape(server_name) + ".";
}

std::vector<std::string> ListFiles(const std::string& directory, const std::string& prefix) {
  std::vector<std::string> names;
  DIR* const folder = opendir(directory.c_str());
  if (folder == nullptr) return names;
  while (const dirent* const entry = readdir(folder)) {
    const std::string_view name = entry->d_name;
    if (name.substr(0, prefix.size()) == prefix) names.emplace_back(name);
  }
  closedir(folder);
  std::sort(names.begin(), names.end());
  return names;
}

Result<std::unique_ptr<Segment>> MapFile(const std::string& path) {
  UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!fd.valid()) return ErrnoError(errno, "cannot open it", "[SMB-E154]");
  return Segment::Map(std::move(fd));
}

}  // namespace

std::string SegmentFileName(std::string_view server_name, std::string_view segment_name) {
  return Prefix(server_name) + Escape(segment_name);
}

FoundSegments FindSegmentFiles(const std::string& directory, std::string_view server_name) {
  FoundSegments found;
  for (const std::string& name : ListFiles(directory, Prefix(server_name))) {
    const std::string path = directory + "/" + name;
    Result<std::unique_ptr<Segment>> segment = MapFile(path);
    if (!segment.ok()) {
      found.refused.push_back(path + ": " + segment.status().message());
    } else if (SegmentFileName(server_name, (*segment)->name()) != name) {
      found.refused.push_back(path + ": it holds segment '" + (*segment)->name() +
                              "', whose file has another name [SMB-E155]");
    } else {
      found.segments.push_back(std::move(segment).value());
    }
  }
  return found;
}

}  // namespace tf_smb
