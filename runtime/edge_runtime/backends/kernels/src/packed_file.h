// Packed weights in a file: made by the first start and mapped by later ones, so that nothing is packed then and the system may drop the pages.
//
// A file has a header, matrices at multiples of kPackedAlignment, and an index of them behind the last one. The header has the layout's version and
// a key: the hash of what the weights were packed from. A file with another version or key, of another user, or of another size than its header
// says is none. Nothing but the key says that the bytes of a matrix are right: whoever may write the file may write the weights. So a file that
// others may write is none either, and a file gets its name when all of its bytes are on the disk.
//
// A file that is written has a temporary name until `keep`. Matrices are packed in memory, written, and mapped in that memory's place: a disk that
// is full is an error of a write, never a signal. Weights are read with fewer addresses to translate where the system maps large pages of the
// file. So a file is written in large pages from its beginning to its end, places in the file and in memory are the same within a large page,
// and matrices lie side by side in both.
#pragma once
#include "layout.h"

namespace edge {

// To be counted up with every change of layout.h's order of bytes, or of the file's.
constexpr uint32_t kPackedVersion = 1;
constexpr size_t kKeyBytes = 32, kMaxPackedName = 127;
constexpr size_t kPackedAlignment = size_t{1} << 16;  // the largest page of the systems that this runs on
constexpr size_t kLargePage = size_t{1} << 21;

class PackedFile {
  public:
    // The file of that key for reading; null where there is none that can be used.
    static PackedFile* open(const char* path, const uint8_t* key);
    // A new file for writing under a temporary name, where nothing may be; null with errno where that is not possible.
    static PackedFile* create(const char* temporary, const uint8_t* key);
    // Frees it; the matrices that were mapped stay. The temporary name of a file that was not kept goes.
    void close();

    bool reads() const { return reads_; }
    // Where the file has a matrix of this name and kind (outputs, inputs, bits, block, minimums, static_scale): maps it, at `place` if that is
    // not null, and sets the rest of `m`. Whoever has a matrix without a place calls `unmap`.
    bool take(const char* name, PackedMatrix& m, void* place = nullptr);
    // Memory of whole pages in which a matrix is packed that is added next; null where there is none. `unmap` frees it.
    void* pages(size_t bytes) const;
    // Adds a matrix that is packed in whole pages (`pages`, or others that the caller frees). They become pages of the file once all of them are
    // written. Returns false where that failed, and then nothing changed but `error`. A second matrix of a name must be the same one.
    bool add(const char* name, const PackedMatrix& m);
    // Waits until all is on the disk, and gives a written file its name. Returns 0 or the error (errno).
    int keep(const char* path);

    int error() const { return error_; }
    // Matrices that were mapped from a file that is read, and those that it had not, or that were added to one that is written.
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
    uint64_t written_;  // a multiple of a large page; what lies behind it is in `piece_`
    char* piece_;
    int64_t in_place_;  // of the matrices that were added, the first ones, which are pages of the file
    uint8_t* whole_;  // a file that is read, mapped from end to end for matrices without a place
    bool* given_;     // which of its matrices were given away
    char* temporary_;
    uint8_t key_[kKeyBytes];
};

// Unmaps a matrix that was mapped without a place.
void unmap(PackedMatrix& m);
// Bytes that a matrix takes in a file and where it is mapped.
constexpr size_t mapped_bytes(size_t bytes) { return (bytes + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment; }

// The file that this thread's loads of models read or write; null: none, weights are packed into memory.
PackedFile* packed_file();
void use_packed_file(PackedFile* file);

}  // namespace edge
