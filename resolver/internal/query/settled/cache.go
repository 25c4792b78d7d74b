package settled

// KeyAt is where, in Bytes, the question stands in the form of AppendKey: a cache finds an entry's key by it.
const KeyAt = headerLen
