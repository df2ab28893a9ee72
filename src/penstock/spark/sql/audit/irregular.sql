-- The keys of messages whose lives are not plain.
--
--   irregular_shard    its shard_key
--   irregular_message  its number
SELECT shard_key AS irregular_shard, message AS irregular_message FROM {messages} WHERE NOT plain
