#include "packed_file.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "export.h"
#include "pack.h"

namespace edge {
namespace {

constexpr char kMagic[8] = {'E', 'D', 'G', 'E', 'P', 'A', 'C', 'K'};
constexpr int64_t kMaxMatrices = int64_t{1} << 16;
constexpr size_t kMaxWrite = size_t{1} << 26;

struct Header {
    char magic[8];
    uint32_t version, check;  // `check` is the checksum of this header, with 0 in place of `check`, and of the index
    uint8_t key[kKeyBytes];
    uint64_t index, count;
};

uint32_t checksum(const void* data, size_t bytes, uint32_t hash = 2166136261u) {
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 16777619u;
    return hash;
}

bool read_all(int file, void* to, size_t bytes, uint64_t offset) {
    for (char* at = static_cast<char*>(to); bytes;) {
        const ssize_t got = pread(file, at, bytes < kMaxWrite ? bytes : kMaxWrite, static_cast<off_t>(offset));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        at += got, bytes -= static_cast<size_t>(got), offset += static_cast<uint64_t>(got);
    }
    return true;
}

void ask_for_large_pages([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
    madvise(memory, mapped_bytes(bytes), MADV_HUGEPAGE);
#endif
}

void lie_at(PackedMatrix& m, const void* memory) {
    m.levels = static_cast<const uint8_t*>(memory);
    m.scales = m.levels + m.level_bytes();
    m.mapped = true;
}

pthread_once_t key_once = PTHREAD_ONCE_INIT;
pthread_key_t thread_file;
bool has_key = false;

void make_key() { has_key = pthread_key_create(&thread_file, nullptr) == 0; }

}  // namespace

struct PackedFile::Entry {
    char name[kMaxPackedName + 1];
    int64_t outputs, inputs;
    int32_t bits, block;
    float static_scale;
    uint8_t half_scales, minimums, zeros[2];
    uint64_t offset, bytes;
    const void* place;  // address in the process that writes; null in a file

    PackedMatrix matrix() const {
        PackedMatrix m = {outputs, inputs, bits, block, half_scales != 0, nullptr, nullptr, minimums != 0, static_scale};
        return m;
    }
    bool is_of(const PackedMatrix& m) const {
        return m.outputs == outputs && m.inputs == inputs && m.bits == bits && m.block == block && m.static_scale == static_scale &&
               m.minimums == (minimums != 0);
    }
};

void unmap(PackedMatrix& m) {
    munmap(const_cast<uint8_t*>(m.levels), mapped_bytes(m.bytes()));
    m.levels = nullptr;
}

PackedFile* PackedFile::open(const char* path, const uint8_t* key) {
    const int file = ::open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (file < 0) return nullptr;
    PackedFile* opened = static_cast<PackedFile*>(calloc(1, sizeof(PackedFile)));
    if (!opened) {
        ::close(file);
        return nullptr;
    }
    opened->file_ = file;
    opened->reads_ = true;
    if (opened->read_index(key)) return opened;
    opened->close();
    return nullptr;
}

PackedFile* PackedFile::create(const char* temporary, const uint8_t* key) {
    const int file = ::open(temporary, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (file < 0) return nullptr;
    flock(file, LOCK_EX | LOCK_NB);  // shows other processes that the file is not a leftover
    PackedFile* created = static_cast<PackedFile*>(calloc(1, sizeof(PackedFile)));
    char *name = strdup(temporary), *piece = static_cast<char*>(malloc(kLargePage));
    if (!created || !name || !piece) {
        free(created);
        free(name);
        free(piece);
        unlink(temporary);
        ::close(file);
        errno = ENOMEM;
        return nullptr;
    }
    created->file_ = file;
    created->temporary_ = name;
    created->piece_ = piece;
    created->end_ = sizeof(Header);
    memset(piece, 0, sizeof(Header));
    memcpy(created->key_, key, kKeyBytes);
    return created;
}

void PackedFile::close() {
    unmap_rest();
    if (temporary_) unlink(temporary_);
    ::close(file_);
    free(temporary_);
    free(entries_);
    free(given_);
    free(piece_);
    free(this);
}

bool PackedFile::read_index(const uint8_t* key) {
    struct stat status;
    Header header;
    if (fstat(file_, &status) || !S_ISREG(status.st_mode) || status.st_uid != geteuid() || status.st_mode & 022) return false;
    if (!read_all(file_, &header, sizeof header, 0) || memcmp(header.magic, kMagic, sizeof kMagic) != 0) return false;
    if (header.version != kPackedVersion || memcmp(header.key, key, kKeyBytes) != 0 || header.count > kMaxMatrices) return false;
    const uint64_t size = static_cast<uint64_t>(status.st_size), index_bytes = header.count * sizeof(Entry);
    if (header.index < sizeof header || header.index > size || size - header.index != index_bytes) return false;
    entries_ = static_cast<Entry*>(calloc(header.count + 1, sizeof(Entry)));
    given_ = static_cast<bool*>(calloc(header.count + 1, sizeof(bool)));
    if (!entries_ || !given_ || !read_all(file_, entries_, index_bytes, header.index)) return false;
    const uint32_t check = header.check;
    header.check = 0;
    if (check != checksum(entries_, index_bytes, checksum(&header, sizeof header))) return false;
    count_ = static_cast<int64_t>(header.count), size_ = size;
    uint64_t end = sizeof header;
    for (int64_t i = 0; i < count_; i++) {
        const Entry& entry = entries_[i];
        const bool super = entry.block == kSuper && entry.static_scale == 0;
        if (entry.name[kMaxPackedName] || entry.half_scales > 1 || entry.minimums > 1) return false;
        if (entry.outputs < 1 || entry.inputs < 1 || entry.block < 1 || entry.inputs % entry.block) return false;
        if (!fits(entry.outputs, entry.inputs, 8, super ? 128 : 16) || entry.bits < 2 || entry.bits > 8) return false;
        if (entry.offset % kPackedAlignment || entry.offset < end || entry.offset > header.index || entry.bytes > header.index - entry.offset) return false;
        if (entry.bytes != entry.matrix().bytes()) return false;
        end = entry.offset + mapped_bytes(entry.bytes);
    }
    return true;
}

const PackedFile::Entry* PackedFile::find(const char* name) const {
    for (int64_t i = 0; i < count_; i++)
        if (strcmp(entries_[i].name, name) == 0) return &entries_[i];
    return nullptr;
}

bool PackedFile::map(const Entry& entry, PackedMatrix& m, void* place) {
    void* memory = mmap(place, mapped_bytes(entry.bytes), PROT_READ, MAP_SHARED | (place ? MAP_FIXED : 0), file_, static_cast<off_t>(entry.offset));
    if (memory == MAP_FAILED) return false;
    ask_for_large_pages(memory, entry.bytes);
    lie_at(m, memory);
    return true;
}

bool PackedFile::place_in_whole(int64_t index, PackedMatrix& m) {
    if (given_[index]) return map(entries_[index], m, nullptr);
    if (!whole_) {
        void* memory = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file_, 0);
        if (memory == MAP_FAILED) return false;
        ask_for_large_pages(memory, size_);
        whole_ = static_cast<uint8_t*>(memory);
    }
    given_[index] = true;
    lie_at(m, whole_ + entries_[index].offset);
    return true;
}

// Unmaps the parts of `whole_` that are not part of a matrix that was taken.
void PackedFile::unmap_rest() {
    uint64_t end = 0;
    for (int64_t i = 0; whole_ && i <= count_; i++) {
        if (i < count_ && !given_[i]) continue;
        const uint64_t next = i < count_ ? entries_[i].offset : size_;
        if (next > end) munmap(whole_ + end, next - end);
        if (i < count_) end = next + mapped_bytes(entries_[i].bytes);
    }
}

bool PackedFile::take(const char* name, PackedMatrix& m, void* place) {
    if (!reads_ || !name[0]) return false;
    const Entry* entry = find(name);
    PackedMatrix found = entry ? entry->matrix() : m;
    if (!entry || !entry->is_of(m) || !(place ? map(*entry, found, place) : place_in_whole(entry - entries_, found))) {
        missed_++;
        return false;
    }
    m = found;
    taken_++;
    return true;
}

bool PackedFile::write(const void* data, size_t bytes, uint64_t offset) {
    for (const char* at = static_cast<const char*>(data); bytes;) {
        const ssize_t done = pwrite(file_, at, bytes < kMaxWrite ? bytes : kMaxWrite, static_cast<off_t>(offset));
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) {
            error_ = done < 0 ? errno : ENOSPC;
            return false;
        }
        at += done, bytes -= static_cast<size_t>(done), offset += static_cast<uint64_t>(done);
    }
    return true;
}

void* PackedFile::pages(size_t bytes) const {
    const size_t room = mapped_bytes(bytes) + kLargePage;
    void* memory = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    char* first = static_cast<char*>(memory);
    const size_t begin = (mapped_bytes(end_) - reinterpret_cast<uintptr_t>(first)) % kLargePage;  // the same offset in a large page as in the file
    if (begin) munmap(first, begin);
    munmap(first + begin + mapped_bytes(bytes), kLargePage - begin);
    ask_for_large_pages(first + begin, bytes);
    return first + begin;
}

// Appends bytes, or zeros if `data` is null. Whole large pages are written at once; the rest is kept in `piece_` until it fills one.
bool PackedFile::append(const void* data, size_t bytes) {
    for (const char* at = static_cast<const char*>(data); bytes;) {
        const size_t held = end_ - written_;
        size_t part = kLargePage - held < bytes ? kLargePage - held : bytes;
        const char* page = piece_;
        if (at && !held && part == kLargePage) page = at, part = bytes / kLargePage * kLargePage;
        else if (at) memcpy(piece_ + held, at, part);
        else memset(piece_ + held, 0, part);
        if (held + part >= kLargePage) {
            if (!write(page, held + part, written_)) return false;
            written_ += held + part;
        }
        end_ += part, bytes -= part;
        if (at) at += part;
    }
    return true;
}

bool PackedFile::map_in_place(const Entry& entry, const void* place) {
    PackedMatrix m = entry.matrix();
    return map(entry, m, const_cast<void*>(place));
}

// Maps all added matrices that are completely written. If mapping one fails, it stays in memory.
void PackedFile::map_written() {
    for (; in_place_ < count_; in_place_++) {
        const Entry& entry = entries_[in_place_];
        if (entry.offset + entry.bytes > written_) return;
        map_in_place(entry, entry.place);
    }
}

// Maps the earlier matrix with the same name. It is an error if its weights differ, because a later start could not tell the two apart.
bool PackedFile::add_again(const Entry& earlier, const PackedMatrix& m) {
    PackedMatrix same = earlier.matrix();
    if (!write(piece_, end_ - written_, written_)) return false;
    const bool fits = earlier.is_of(m) && earlier.half_scales == m.half_scales && map(earlier, same, nullptr);
    const bool equal = fits && memcmp(same.levels, m.levels, earlier.bytes) == 0;
    if (fits) unmap(same);
    if (equal && map_in_place(earlier, m.levels)) return true;
    error_ = EEXIST;
    return false;
}

bool PackedFile::add(const char* name, const PackedMatrix& m) {
    if (reads_ || error_ || !name[0] || strlen(name) > kMaxPackedName) return false;
    if (const Entry* earlier = find(name)) return add_again(*earlier, m);
    if (count_ == room_) {
        const int64_t room = room_ ? 2 * room_ : 64;
        void* entries = room > kMaxMatrices ? nullptr : realloc(entries_, static_cast<size_t>(room) * sizeof(Entry));
        if (!entries) {
            error_ = ENOMEM;
            return false;
        }
        entries_ = static_cast<Entry*>(entries);
        room_ = room;
    }
    Entry entry = {};
    memcpy(entry.name, name, strlen(name));
    entry.outputs = m.outputs, entry.inputs = m.inputs, entry.bits = m.bits, entry.block = m.block, entry.static_scale = m.static_scale;
    entry.half_scales = m.half_scales, entry.minimums = m.minimums;
    entry.offset = mapped_bytes(end_), entry.bytes = m.bytes(), entry.place = m.levels;
    const uintptr_t place = reinterpret_cast<uintptr_t>(m.levels);
    if (entry.bytes >= kLargePage) entry.offset += (place - entry.offset) % kLargePage / kPackedAlignment * kPackedAlignment;
    if (!append(nullptr, entry.offset - end_) || !append(m.levels, entry.bytes)) return false;
    entries_[count_++] = entry;
    map_written();
    return true;
}

int PackedFile::keep(const char* path) {
    if (reads_) return EINVAL;
    if (error_) return error_;
    Header header = {};
    memcpy(header.magic, kMagic, sizeof kMagic);
    memcpy(header.key, key_, kKeyBytes);
    header.version = kPackedVersion;
    header.index = mapped_bytes(end_), header.count = static_cast<uint64_t>(count_);
    for (int64_t i = 0; i < count_; i++) entries_[i].place = nullptr;
    const size_t index_bytes = static_cast<size_t>(count_) * sizeof(Entry);
    header.check = checksum(entries_, index_bytes, checksum(&header, sizeof header));
    if (!append(nullptr, header.index - end_) || !append(entries_, index_bytes)) return error_;
    if (!write(piece_, end_ - written_, written_) || !write(&header, sizeof header, 0)) return error_;
    if (fsync(file_) || rename(temporary_, path)) return error_ = errno;
    free(temporary_);
    temporary_ = nullptr;
    return 0;
}

PackedFile* packed_file() {
    pthread_once(&key_once, make_key);
    return has_key ? static_cast<PackedFile*>(pthread_getspecific(thread_file)) : nullptr;
}

void use_packed_file(PackedFile* file) {
    pthread_once(&key_once, make_key);
    if (has_key) pthread_setspecific(thread_file, file);
}

}  // namespace edge

using namespace edge;

// Opens the file of packed weights at `path` for reading; null if there is no usable file with this key (32 bytes).
EDGE_EXPORT PackedFile* edge_packed_open(const char* path, const uint8_t* key) { return PackedFile::open(path, key); }

// Creates a file for writing, under a temporary name; null if that fails, with errno in `error`.
EDGE_EXPORT PackedFile* edge_packed_create(const char* temporary, const uint8_t* key, int* error) {
    PackedFile* file = PackedFile::create(temporary, key);
    *error = file ? 0 : errno;
    return file;
}

// Models that this thread loads use the file, until the next call with another file or null.
EDGE_EXPORT void edge_packed_use(PackedFile* file) { use_packed_file(file); }

// counts [2]: how many matrices were mapped from the file, and how many were packed, because the file is new or lacks them. Returns the errno of a
// failed write, or 0.
EDGE_EXPORT int edge_packed_counts(const PackedFile* file, int64_t* counts) {
    counts[0] = file->taken(), counts[1] = file->packed();
    return file->error();
}

// Writes everything to the disk and gives the file its final name. Returns 0, or an errno.
EDGE_EXPORT int edge_packed_keep(PackedFile* file, const char* path) { return file->keep(path); }

// Frees the object. Mapped matrices stay valid; a new file that was not kept is deleted.
EDGE_EXPORT void edge_packed_close(PackedFile* file) { file->close(); }

// The version of the layout.
EDGE_EXPORT uint32_t edge_packed_version() { return kPackedVersion; }
