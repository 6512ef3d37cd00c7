"""What was read is told once, however often and in whatever company it was."""

from serving.usage.table_usage import READ_HASHES_MAX, ReadHashes, pack_hashes


def test_reads_are_told_once_by_table_and_what_is_too_much_is_left_out() -> None:
    reads = ReadHashes()
    reads.add("g", "t", (1,))
    reads.add("g", "t", [1, 2, 3])
    reads.add("g", "u", [3, b"a digest"])
    reads.add("other", "t", [9])
    reads.add("g", "t", list(range(READ_HASHES_MAX)))

    hashes_by_table = {table: sorted(pack_hashes(keys)) for table, keys in reads.drain("g").items()}

    assert hashes_by_table == {
        "t": [number.to_bytes(8, "little") for number in (1, 2, 3)],
        "u": [(3).to_bytes(8, "little")],
    }
    assert reads.left_out_hash_count == READ_HASHES_MAX and reads.drain("g") == reads.drain("other") == {}
    reads.add("g", "t", list(range(READ_HASHES_MAX)))
    assert len(pack_hashes(reads.drain("g")["t"])) == READ_HASHES_MAX
