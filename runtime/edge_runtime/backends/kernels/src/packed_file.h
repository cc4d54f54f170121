// Packed weights in a file. The first start writes the file and later starts map it. So nothing has to be packed again, and the system may drop
// the pages of weights.
//
// A file has a header, matrices at multiples of kPackedAlignment, and an index after the last matrix. The header has the layout's version and a
// key: the hash of what the weights were packed from. A file is not used if it has another version or key, belongs to another user, or does not
// have the size that its header states. The bytes of matrices are not checked, so whoever may write the file can change the weights. Hence a file
// that others may write is not used either, and a file gets its final name only when all of its bytes are on the disk.
//
// While a file is written, until `keep`, it has a temporary name. Matrices are packed in memory, written, and then mapped over that memory. So a
// full disk is an error of a write, never a signal. If the system maps large pages of the file, fewer addresses have to be translated when weights
// are read. Therefore a file is written in large pages from beginning to end, a matrix has the same offset within a large page in the file and in
// memory, and matrices are contiguous in both.
#pragma once
#include "layout.h"

namespace edge {

// Must be increased with every change of the layout of weights (layout.h) or of the file.
constexpr uint32_t kPackedVersion = 1;
constexpr size_t kKeyBytes = 32, kMaxPackedName = 127;
constexpr size_t kPackedAlignment = size_t{1} << 16;  // the largest page size of all supported systems
constexpr size_t kLargePage = size_t{1} << 21;

class PackedFile {
  public:
    // Opens a file for reading; null if there is no usable file with this key.
    static PackedFile* open(const char* path, const uint8_t* key);
    // Creates a file for writing under a temporary name, which must not exist yet; null, with errno set, if that fails.
    static PackedFile* create(const char* temporary, const uint8_t* key);
    // Frees the object. Mapped matrices stay valid. A new file that was not kept is deleted.
    void close();

    bool reads() const { return reads_; }
    // If the file has a matrix of this name and kind (outputs, inputs, bits, block, minimums, static_scale): maps it, at `place` unless that is
    // null, sets the rest of `m`, and returns true. A matrix that was mapped without a place must be freed with `unmap`.
    bool take(const char* name, PackedMatrix& m, void* place = nullptr);
    // Allocates whole pages for packing the matrix that is added next; null if there is no memory. `unmap` frees them.
    void* pages(size_t bytes) const;
    // Adds a matrix that is packed in whole pages (from `pages`, or others that the caller frees). They are replaced by pages of the file once all
    // of them are written. After a failure it returns false, and only `error` has changed. A second matrix with the same name must be equal.
    bool add(const char* name, const PackedMatrix& m);
    // Waits until all is on the disk, and gives a written file its final name. Returns 0 or the error (errno).
    int keep(const char* path);

    int error() const { return error_; }
    // How many matrices were mapped from a file that is read; and how many were missing in it, or added to a file that is written.
    int64_t taken() const { return taken_; }
    int64_t packed() const { return reads_ ? missed_ : count_; }

  private:
    struct Entry;
    bool read_index(const uint8_t* key);
    const Entry* find(const char* name) const;
    bool map(const Entry& entry, PackedMatrix& m, void* place);
    bool add_again(const Entry& earlier, const PackedMatrix& m);
    bool place_in_whole(int64_t index, PackedMatrix& m);
    void unmap_rest();
    bool map_in_place(const Entry& entry, const void* place);
    void map_written();
    bool append(const void* data, size_t bytes);
    bool write(const void* data, size_t bytes, uint64_t offset);

    int file_, error_;
    bool reads_;
    Entry* entries_;
    int64_t count_, room_, taken_, missed_;
    uint64_t end_, size_;
    uint64_t written_;  // bytes in the file, a multiple of a large page; the rest is in `piece_`
    char* piece_;
    int64_t in_place_;  // how many of the added matrices, from the first on, are mapped from the file already
    uint8_t* whole_;  // for reading: a mapping of the whole file, for matrices without a place
    bool* given_;     // by matrix: whether it was taken from `whole_`
    char* temporary_;
    uint8_t key_[kKeyBytes];
};

// Frees a matrix that was mapped without a place.
void unmap(PackedMatrix& m);
// The bytes that a matrix takes in a file and in memory: whole pages.
constexpr size_t mapped_bytes(size_t bytes) { return (bytes + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment; }

// The file that models which this thread loads read from or write to; null: none, so weights are packed into memory.
PackedFile* packed_file();
void use_packed_file(PackedFile* file);

}  // namespace edge
