// Clang thread-safety attributes, so that the compiler checks which lock guards
// what. Empty on compilers that do not know them.
#ifndef TF_SMB_CC_COMMON_THREAD_ANNOTATIONS_H_
#define TF_SMB_CC_COMMON_THREAD_ANNOTATIONS_H_

#if defined(__clang__)
#define TF_SMB_ATTRIBUTE(x) __attribute__((x))
#else
#define TF_SMB_ATTRIBUTE(x)
#endif

#define CAPABILITY(x) TF_SMB_ATTRIBUTE(capability(x))
#define SCOPED_CAPABILITY TF_SMB_ATTRIBUTE(scoped_lockable)
#define GUARDED_BY(x) TF_SMB_ATTRIBUTE(guarded_by(x))
#define REQUIRES(...) TF_SMB_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define ACQUIRE(...) TF_SMB_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define RELEASE(...) TF_SMB_ATTRIBUTE(release_capability(__VA_ARGS__))
#define EXCLUDES(...) TF_SMB_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define NO_THREAD_SAFETY_ANALYSIS TF_SMB_ATTRIBUTE(no_thread_safety_analysis)

#endif  // TF_SMB_CC_COMMON_THREAD_ANNOTATIONS_H_
