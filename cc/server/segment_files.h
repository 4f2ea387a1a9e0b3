// Names of segments in a folder: whose they are, which server's, which segment.
#ifndef TF_SMB_CC_SERVER_SEGMENT_FILES_H_
#define TF_SMB_CC_SERVER_SEGMENT_FILES_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cc/box/segment.h"

namespace tf_smb {

// "tf_smb.<user>.<server>.<segment>"; other bytes than letters, digits, "_" and "-" as
// "%2F", and a long name as its beginning and checksum.
std::string SegmentFileName(std::string_view server_name, std::string_view segment_name);

struct FoundSegments {
  std::vector<std::unique_ptr<Segment>> segments;
  std::vector<std::string> refused;  // "path: why"
};
// What servers of this name, user and folder left behind.
FoundSegments FindSegmentFiles(const std::string& directory, std::string_view server_name);

}  // namespace tf_smb

#endif  // TF_SMB_CC_SERVER_SEGMENT_FILES_H_
